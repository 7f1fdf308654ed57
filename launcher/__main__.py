"""Entry point of `python -m elastrain.launcher`, which is the same as the command `elastrain`."""

from elastrain.launcher.cli.main import main

if __name__ == "__main__":
    main()
