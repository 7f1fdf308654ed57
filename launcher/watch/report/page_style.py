"""The style of the report page: one palette for each theme, and the rules that use it.

Texts have a contrast of at least 4.5 to 1 in both themes; printing takes the light one.
"""

from __future__ import annotations

LIGHT = {
    "paper": "#ffffff",
    "panel": "#f6f8fa",
    "text": "#1f2328",
    "quiet": "#57606a",
    "grid": "#d0d7de",
    "member": "#0969da",
    "warming": "#afb8c1",
    "bad": "#b42318",
    "good": "#116329",
    "phase0": "#6e7781",
    "phase1": "#8250df",
    "phase2": "#bf8700",
    "phase3": "#0969da",
    "phase4": "#1a7f37",
}
DARK = {
    "paper": "#0d1117",
    "panel": "#161b22",
    "text": "#e6edf3",
    "quiet": "#9da7b3",
    "grid": "#30363d",
    "member": "#58a6ff",
    "warming": "#6e7681",
    "bad": "#ff7b72",
    "good": "#56d364",
    "phase0": "#8b949e",
    "phase1": "#bc8cff",
    "phase2": "#d29922",
    "phase3": "#58a6ff",
    "phase4": "#3fb950",
}


def _variables(palette: dict[str, str]) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in palette.items())


_RULES = """
*{box-sizing:border-box}
body{margin:0 auto;max-width:1100px;padding:1.5rem;background:var(--paper);color:var(--text);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
h1{font-size:1.5rem;margin:0 0 .5rem;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:2rem 0 .4rem}
p{margin:.3rem 0;max-width:75ch}.quiet,.none{color:var(--quiet)}.bad{color:var(--bad)}
dl{display:flex;flex-wrap:wrap;gap:.6rem 2rem;background:var(--panel);padding:.8rem 1rem;border-radius:6px;margin:0}
dt{color:var(--quiet);font-size:.85rem}dd{margin:0;font-weight:600}
svg{width:100%;height:auto;display:block}svg text{fill:var(--quiet);font-size:12px}
.chart{overflow-x:auto}.chart>svg{min-width:640px}
.grid{stroke:var(--grid)}.stem{stroke:var(--phase1);stroke-width:1.5}.member{fill:var(--member)}.warming{fill:url(#hatch);stroke:var(--warming)}
.lost{stroke:var(--bad);stroke-width:2.5;fill:none}.mark{fill:var(--good)}
polyline{fill:none;stroke-width:1.5;stroke-linejoin:round;stroke:var(--member)}
polyline.c1{stroke:var(--phase1)}polyline.c2{stroke:var(--phase2)}polyline.c3{stroke:var(--phase4)}
polyline.c4{stroke:var(--bad)}polyline.limit{stroke:var(--bad);stroke-dasharray:6 4}
.phase0{fill:var(--phase0)}.phase1{fill:var(--phase1)}.phase2{fill:var(--phase2)}
.phase3{fill:var(--phase3)}.phase4{fill:var(--phase4)}
.table{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.88rem}
th,td{padding:.25rem .5rem;border-bottom:1px solid var(--grid);text-align:left;vertical-align:top}
th{color:var(--quiet);font-weight:600}td.number,th.number{text-align:right;font-variant-numeric:tabular-nums;
white-space:nowrap}td.what{min-width:9em}svg.bar{width:120px;min-width:120px}.key{display:inline-block;width:.8em;height:.8em}
"""
_PRINT = """
body{max-width:none;padding:0;font-size:10pt}h2{break-after:avoid}tr,.chart>svg{break-inside:avoid}
.chart,.table{overflow:visible}thead{display:table-header-group}.chart.long>svg{break-inside:auto}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}
"""


def style() -> str:
    """Return the style sheet."""
    return (
        f":root{{color-scheme:light dark;{_variables(LIGHT)}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}"
        f"{_RULES}@media print{{{_PRINT}}}"
    )
