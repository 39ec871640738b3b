"""`python -m zbcompile.checkpoints verify|list|prune DIR`: look after folders of checkpoints."""

from zbcompile.cli.command_table import main_of, run_and_exit

main = main_of("checkpoints")

if __name__ == "__main__":
    run_and_exit("checkpoints")
