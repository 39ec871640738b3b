"""`python -m zbcompile COMMAND ...`: all commands."""

from zbcompile.cli.command_table import choose_and_exit

if __name__ == "__main__":
    choose_and_exit()
