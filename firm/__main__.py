"""`python -m firm` is the command `firm`."""

from firm.cli.main import main

if __name__ == "__main__":
    main()
