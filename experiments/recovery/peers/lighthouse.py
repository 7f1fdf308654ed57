"""TorchFT's lighthouse, the server that decides who is in a quorum. Run by path: it reads the process's arguments."""

from __future__ import annotations

from torchft._torchft import lighthouse_main

if __name__ == "__main__":
    lighthouse_main()
