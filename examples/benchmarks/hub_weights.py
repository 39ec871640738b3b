"""Peak memory of each rank that loads a folder of the Hub into a pipeline without memory.

python examples/benchmarks/hub_weights.py --write FOLDER         # a Llama of --layers layers, in
many files torchrun --standalone --nproc-per-node 2 examples/benchmarks/hub_weights.py FOLDER
"""

import argparse
from pathlib import Path

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

import zbcompile

MIB = 2**20


def write(folder: str, layers: int) -> None:
    config = LlamaConfig(
        vocab_size=512, hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers
    )
    config.num_attention_heads = config.num_key_value_heads = 16
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="32MB")


def status(field: str) -> float:
    """A line of /proc/self/status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def load(folder: str) -> None:
    torch.set_num_threads(1)
    with init_empty_weights():
        model = LlamaForCausalLM(AutoConfig.from_pretrained(folder))
    model.tie_weights()
    pipe = zbcompile.pipeline(model, schedule="zb-v", microbatches=4)
    ids = torch.zeros(4, 8, dtype=torch.long)
    pipe.compile(input_ids=ids, labels=ids)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before, memory = status("VmHWM"), status("RssAnon")
    zbcompile.load_weights(folder, pipe)
    parameter_mib = sum(parameter.nbytes for parameter in pipe.parameters()) / MIB
    files = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) / MIB
    print(
        f"rank {pipe.ranks.rank}: files {files:.0f} MiB, own parameters {parameter_mib:.0f} MiB; loading adds"
        f" {status('RssAnon') - memory:.0f} MiB of memory, at most {status('VmHWM') - before:.0f}"
        " MiB with mapped files",
        flush=True,
    )
    pipe.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    if options.write:
        write(options.folder, options.layers)
    else:
        load(options.folder)
