"""`python -m zbcompile.run DIR --data FILE.py:batches`, also under torchrun: train a program with a
data function."""

from zbcompile.cli.command_table import main_of, run_and_exit

main = main_of("run")

if __name__ == "__main__":
    run_and_exit("run")
