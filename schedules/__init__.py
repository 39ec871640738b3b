if __name__ != "zbcompile.schedules":  # a folder called "schedules" on sys.path must never be mistaken for this package
    raise ImportError(f"import this package as 'zbcompile.schedules', not as {__name__!r}")

"""Pipeline schedules as plain data: generate, check, lower, simulate, draw. Imports neither torch nor sympy."""
