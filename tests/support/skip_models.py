"""Models in which later layers read a value: a U-Net, an encoder with a decoder, residuals to every
layer, a branch."""

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


class Residuals(nn.Module):
    """Every layer reads the results of all layers before it, weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(8)
        self.weights = nn.ParameterList(torch.ones(i + 1) / (i + 1) for i in range(8))

    def forward(self, x: Tensor) -> Tensor:
        created = [x]
        for layer, weights in zip(self.layers, self.weights, strict=True):
            mixed = created[0] * weights[0]
            for value, weight in zip(created[1:], weights[1:], strict=True):
                mixed = mixed + value * weight
            created.append(torch.tanh(layer(mixed)))
        return created[-1]


class Masked(nn.Module):
    """Later layers read which entries of an early value are positive, and no gradient flows back
    for that."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        mask = x > 0
        for i, layer in enumerate(self.layers[1:]):
            x = torch.tanh(layer(torch.where(mask, x, 0.5 * x) if i in (4, 6) else x))
        return x
