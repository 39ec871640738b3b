"""`python -m zbcompile.calibrate --output FILE`: measure the machine at hand for `--hardware FILE`."""

from zbcompile.cli.command_table import main_of, run_and_exit

main = main_of("calibrate")

if __name__ == "__main__":
    run_and_exit("calibrate")
