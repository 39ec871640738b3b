"""The bridge to torch.distributed.pipelining: our stages under torch's schedules."""
