"""`python -m zbcompile.doctor`: check a machine, or under torchrun a cluster, before a run."""

from zbcompile.cli.command_table import main_of, run_and_exit

main = main_of("doctor")

if __name__ == "__main__":
    run_and_exit("doctor")
