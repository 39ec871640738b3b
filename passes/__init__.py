"""Graph passes: from an nn.Module to the F, B, W and BW graphs of every stage. Never imports
torch.distributed."""

if (
    __name__ != "zbcompile.passes"
):  # a folder called "passes" on sys.path must never be mistaken for this package
    raise ImportError(f"import this package as 'zbcompile.passes', not as {__name__!r}")
