"""`python -m bayeslim`: the command line."""

from bayeslim.app.cli import main

main()
