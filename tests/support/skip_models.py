"""Models in which later layers read a value: a U-Net, an encoder with a decoder."""

import torch
from torch import Tensor, nn

WIDTH = 32


def layers(count: int, inputs: int = WIDTH) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(inputs, WIDTH) for _ in range(count))


class UNet(nn.Module):
    """Each layer of the way up reads the result of the layer of its size on the way down."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = layers(4), layers(4, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        saved = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            saved.append(x)
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, saved.pop()], -1)))
        return x


class EncoderDecoder(nn.Module):
    """Every layer of the decoder reads the encoder's result twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.keys, self.values = layers(3), layers(5), layers(5)

    def forward(self, x: Tensor) -> Tensor:
        memory = result = x
        for layer in self.encoder:
            memory = torch.tanh(layer(memory))
        for key, value in zip(self.keys, self.values, strict=True):
            result = result + torch.sigmoid(key(memory) * result) * value(memory)
        return result
