"""The length of a step, the causes of idle time, and closed forms."""
