"""`python -m knowgate` is the command `knowgate`."""

from knowgate.cli.main import main

if __name__ == "__main__":
    main()
