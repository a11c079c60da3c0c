"""`python -m softdb` is the command `softdb`."""

from softdb.cli import main

main()
