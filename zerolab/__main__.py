"""Chapter 12: `python -m zerolab`, and with it `torchrun -m zerolab`, is the command line."""

from .cli import main

if __name__ == "__main__":
    main()
