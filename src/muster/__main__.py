"""`python -m muster`: the command line of this interpreter's muster."""

from muster.cli.entry import main

if __name__ == "__main__":
    main()
