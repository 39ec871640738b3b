"""NCCL with one rank: does a group begin, and do collectives of one rank leave what they should.

python examples/benchmarks/nccl_alone.py
"""

import time

import torch
import torch.distributed as dist


def main() -> None:
    torch.cuda.set_device(0)
    device, began = torch.device("cuda", 0), time.perf_counter()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    values = torch.arange(1 << 20, device=device, dtype=torch.float32)
    summed, gathered = values.clone(), torch.empty_like(values)
    dist.all_reduce(summed)
    dist.broadcast(summed, 0)
    dist.all_gather_into_tensor(gathered, values)
    torch.cuda.synchronize()
    print(f"first collectives after {time.perf_counter() - began:.2f} s")
    for name, result in (("all_reduce", summed), ("all_gather", gathered)):
        print(f"{name}: {'right' if torch.equal(result, values) else 'WRONG'}")
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        dist.all_reduce(summed)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    print(f"all_reduce of 4 MiB: {1e6 * sorted(times)[10]:.0f} us")
    dist.destroy_process_group()
    if not torch.equal(gathered, values):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
