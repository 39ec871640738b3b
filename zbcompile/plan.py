"""`python -m zbcompile.plan TARGET --ranks N`: the table, and a picture, to look at before asking for machines."""

from zbcompile.cli.command_table import main_of, run_and_exit

main = main_of("plan")

if __name__ == "__main__":
    run_and_exit("plan")
