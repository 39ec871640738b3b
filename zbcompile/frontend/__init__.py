"""`zbcompile.pipeline` and the Pipeline it returns."""
