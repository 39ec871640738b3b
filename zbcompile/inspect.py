"""`python -m zbcompile.inspect TARGET`: what zbcompile would compile a model to, without running
it."""

from zbcompile.cli.command_table import main_of, run_and_exit

main = main_of("inspect")

if __name__ == "__main__":
    run_and_exit("inspect")
