"""`python -m softdb` is the command `softdb`."""

from softdb.tools.cli import main

main()
