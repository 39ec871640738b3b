"""The user's interface: `zbcompile.pipeline` and the Pipeline that it returns."""
