"""Pages in a real headless Chromium: screenshots, console errors, requests over the network, contrast of texts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
THEMES = {"light": "1", "dark": "0"}
_QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
_OF_THE_BROWSER = (
    r"https?://(accounts|clients\d|update|redirector|optimizationguide-pa)\.(google|googleapis|gvt1)\.com/"
)
"""Addresses that Chromium asks by itself, whatever the page is."""
_CONTRASTS = """
<script>
function lum(c){const v=c.map(x=>{x/=255;return x<=0.03928?x/12.92:Math.pow((x+0.055)/1.055,2.4)});
return 0.2126*v[0]+0.7152*v[1]+0.0722*v[2]}
function rgb(s){const m=s.match(/[\\d.]+/g).map(Number);return m.length>3&&m[3]===0?null:m.slice(0,3)}
function ground(e){for(;e;e=e.parentElement){const c=rgb(getComputedStyle(e).backgroundColor);if(c)return c}
return [255,255,255]}
const found=[];
for(const e of document.body.querySelectorAll('*')){
if(['STYLE','SCRIPT','TITLE','PATTERN'].includes(e.tagName.toUpperCase()))continue;
if(![...e.childNodes].some(n=>n.nodeType===3&&n.textContent.trim()))continue;
const style=getComputedStyle(e),svg=e instanceof SVGElement;
const one=lum(rgb(svg?style.fill:style.color)),two=lum(ground(svg?e.ownerSVGElement.parentElement:e));
found.push([(Math.max(one,two)+0.05)/(Math.min(one,two)+0.05),e.tagName+': '+e.textContent.slice(0,40)]);}
found.sort((a,b)=>a[0]-b[0]);
document.body.innerHTML='<pre id="result"></pre>';
document.getElementById('result').textContent=JSON.stringify({texts:found.length,least:found[0],
wide:document.documentElement.scrollWidth>innerWidth});
</script>
"""


def _run(folder: Path, theme: str, page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    settings = f"--blink-settings=preferredColorScheme={THEMES[theme]}"
    command = [CHROMIUM, *_QUIET, settings, f"--user-data-dir={folder / 'profile'}", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def screenshot(page: Path, out: Path, *, width: int, height: int, theme: str, folder: Path) -> list[str]:
    """Take a screenshot, and return the lines that the page has written to the console."""
    options = ("--enable-logging=stderr", f"--window-size={width},{height}", f"--screenshot={out}")
    done = _run(folder, theme, page, *options)
    assert out.is_file(), done.stderr[-2000:]
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def requests(page: Path, folder: Path) -> set[str]:
    """Return the addresses that the browser has asked for, other than files."""
    log = folder / "net.json"
    _run(folder, "light", page, f"--log-net-log={log}", f"--screenshot={folder / 'unused.png'}")
    found = set(re.findall(r'"url":"(https?://[^"]+)"', log.read_text()))
    return {url for url in found if not re.match(_OF_THE_BROWSER, url)}


def texts(page: Path, folder: Path, *, theme: str, width: int) -> dict[str, object]:
    """Return the number of texts, the least contrast with its text, and if the page is wider than the window."""
    probed = folder / "probed.html"
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text())
    probed.write_text(text.replace("</body>", _CONTRASTS + "</body>"))
    dumped = _run(folder, theme, probed, "--dump-dom", f"--window-size={width},900").stdout
    found = re.search(r'<pre id="result">(.*?)</pre>', dumped, re.S)
    assert found is not None, dumped[-2000:]
    measured: dict[str, object] = json.loads(found[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))
    return measured
