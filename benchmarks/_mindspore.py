"""Train an ensemble of LeNet-5 with MindSpore's `vmap` over a `CellList`, in an environment with MindSpore.

python _mindspore.py MEMBERS BATCH      prints "name" and its name; then takes a step and prints "done" for each line
"""

import sys

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.common.initializer import Normal


class LeNet5(nn.Cell):
    """LeNet-5 on 32x32 images of one channel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, pad_mode="valid")
        self.conv2 = nn.Conv2d(6, 16, 5, pad_mode="valid")
        self.pool = nn.MaxPool2d(kernel_size=2, stride=2)
        self.flatten = nn.Flatten()
        self.dense1 = nn.Dense(400, 120, weight_init=Normal(0.05))
        self.dense2 = nn.Dense(120, 84, weight_init=Normal(0.05))
        self.dense3 = nn.Dense(84, 10, weight_init=Normal(0.05))
        self.relu = nn.ReLU()

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        x = self.pool(self.relu(self.conv1(x)))
        x = self.flatten(self.pool(self.relu(self.conv2(x))))
        return self.dense3(self.relu(self.dense2(self.relu(self.dense1(x)))))


class Step(nn.Cell):
    """One training step of one member."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.network = nn.WithLossCell(LeNet5(), nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"))
        self.weights = ms.ParameterTuple(self.network.trainable_params())
        self.optimizer = nn.Adam(self.weights, learning_rate=rate, use_amsgrad=True)
        self.gradient = ops.GradOperation(get_by_list=True)

    def construct(self, x: ms.Tensor, y: ms.Tensor) -> ms.Tensor:
        loss = self.network(x, y)
        return ops.depend(loss, self.optimizer(self.gradient(self.network, self.weights)(x, y)))


def main() -> None:
    members, batch = map(int, sys.argv[1:])
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    rates = (1e-2, 1e-3, 2e-3, 3e-3)
    step = ops.vmap(nn.CellList([Step(rates[i % 4]) for i in range(members)]), in_axes=(0, 0))
    generator = np.random.default_rng(0)
    x = ms.Tensor(generator.normal(size=(members, batch, 1, 32, 32)).astype(np.float32))
    y = ms.Tensor(generator.integers(0, 10, (members, batch)).astype(np.int32))
    assert step(x, y).asnumpy().shape == (members,)
    print(f"name MindSpore {ms.__version__}", flush=True)
    for _ in sys.stdin:
        step(x, y).asnumpy()
        print("done", flush=True)


if __name__ == "__main__":
    main()
