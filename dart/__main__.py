"""`python -m dart`."""

from dart.cli import main

if __name__ == "__main__":
    main()
