"""`python -m zbcompile.compile TARGET --output DIR`: compile ahead of time, for
`zbcompile.load`."""

from zbcompile.cli.command_table import main_of, run_and_exit

main = main_of("compile")

if __name__ == "__main__":
    run_and_exit("compile")
