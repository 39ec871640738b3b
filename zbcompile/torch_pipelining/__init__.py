"""Bridges to torch.distributed.pipelining: our stages under torch's schedules, torch's calls on our
step."""
