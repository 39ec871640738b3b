"""What a user holds: `zbcompile.pipeline` and the Pipeline that it returns."""
