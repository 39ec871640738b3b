"""What looks at the steps of a pipeline: the recorder, trace and monitor, and the origin of
a NaN."""
