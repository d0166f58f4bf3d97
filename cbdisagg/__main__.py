"""`python -m cbdisagg` is the command `cbdisagg`."""

from cbdisagg.cli import main

main()
