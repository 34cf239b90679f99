"""``python -m sedd``."""

from sedd.cli import main

main()
