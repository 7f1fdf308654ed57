"""`python -m elastrain.launcher` is the same as `elastrain`."""

from elastrain.launcher.cli.main import main

if __name__ == "__main__":
    main()
