"""`python -m bayeslim`: the command line."""

from bayeslim.cli import main

main()
