"""Small networks with every kind of chain between filters and the layers that read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from s3d_fast.models import DGCNN
from tests.model_cases import net

Act = Callable[[], nn.Module]


@dataclass(frozen=True, eq=False)
class ChainCase:
    """A network, the shape of one sample, and the operators that capture makes of its units."""

    name: str
    make: Callable[[Act], nn.Module]
    shape: tuple[int, ...]
    operators: dict[str, str]

    def __str__(self) -> str:
        return self.name

    def model(self, act: Act = nn.SiLU, seed: int = 0) -> nn.Module:
        """Return the network in eval mode and float64, with BatchNorms that do something."""
        torch.manual_seed(seed)
        model = self.make(act).double()
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                assert module.running_var is not None
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 2)
            if isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.InstanceNorm2d)) and module.weight is not None:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
        return model.eval()

    def inputs(self, count: int = 6, seed: int = 1) -> Tensor:
        """Return samples."""
        return torch.randn(count, *self.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _mobile(act: Act, first: nn.Module, *stages: nn.Module) -> nn.Module:
    return nn.Sequential(first, nn.BatchNorm2d(6), act(), *stages, nn.Conv2d(6, 5, 1), act(), Mean(), nn.Linear(5, 3))


class Mean(nn.Module):
    """The mean over all positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def _depthwise(act: Act, stride: int = 1, norm: bool = True, dilation: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(6, 6, 3, stride=stride, padding=dilation, dilation=dilation, groups=6, bias=not norm)
    return [conv, nn.BatchNorm2d(6), act()] if norm else [conv, act()]


def _excitation(act: Act) -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = self.act(self.norm(self.conv(x)))
        gated = h * torch.sigmoid(self.up(self.act(self.down(h.mean((2, 3), keepdim=True)))))
        return self.head(self.act(self.out(gated)).mean((2, 3)))

    return net(
        forward,
        conv=nn.Conv2d(3, 6, 3, padding=1),
        norm=nn.BatchNorm2d(6),
        down=nn.Conv2d(6, 4, 1),
        up=nn.Conv2d(4, 6, 1),
        out=nn.Conv2d(6, 5, 1),
        head=nn.Linear(5, 3),
        act=act(),
    )


def _two_linears(act: Act) -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.head(self.act(self.a(x)) * self.b(x))

    return net(forward, a=nn.Linear(5, 6), b=nn.Linear(5, 6), head=nn.Linear(6, 3), act=act())


def _two_curved_linears(act: Act) -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.head(self.act(self.a(x)) * torch.tanh(self.b(x)))

    return net(forward, a=nn.Linear(5, 6, bias=False), b=nn.Linear(5, 6, bias=False), head=nn.Linear(6, 3), act=act())


def _chunked(act: Act) -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        u, v = self.both(x).chunk(2, -1)
        return self.head(self.act(u) * v)

    return net(forward, both=nn.Linear(5, 12), head=nn.Linear(6, 3), act=act())


def _gate_of_other_rows(act: Act) -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.head(self.act(self.a(x[..., :3])) * self.b(x[..., 3:]))

    return net(forward, a=nn.Linear(3, 6), b=nn.Linear(2, 6), head=nn.Linear(6, 3), act=act())


def _stream(act: Act) -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = self.act(self.norm(self.stem(x)))
        h = self.act(h + self.norm2(self.up(self.act(self.norm1(self.down(h))))))
        h = self.act(h + self.up2(self.act(self.down2(h))))
        return self.head(h.mean((2, 3)))

    return net(
        forward,
        stem=nn.Conv2d(3, 6, 3, padding=1),
        norm=nn.BatchNorm2d(6),
        down=nn.Conv2d(6, 5, 3, padding=1),
        norm1=nn.BatchNorm2d(5),
        up=nn.Conv2d(5, 6, 3, padding=1),
        norm2=nn.BatchNorm2d(6),
        down2=nn.Conv2d(6, 4, 1),
        up2=nn.Conv2d(4, 6, 1),
        head=nn.Linear(6, 3),
        act=act(),
    )


def _preactivation_stream(act: Act) -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = self.stem(x)
        h = h + self.up(self.act(self.norm1(self.down(self.act(self.norm0(h))))))
        h = h + self.up2(self.act(self.down2(self.act(self.norm2(h)))))
        return self.head(self.act(self.norm3(h)).mean((2, 3)))

    return net(
        forward,
        stem=nn.Conv2d(3, 6, 3, padding=1),
        norm0=nn.BatchNorm2d(6),
        down=nn.Conv2d(6, 5, 3, padding=1),
        norm1=nn.BatchNorm2d(5),
        up=nn.Conv2d(5, 6, 3, padding=1),
        norm2=nn.BatchNorm2d(6),
        down2=nn.Conv2d(6, 4, 1),
        up2=nn.Conv2d(4, 6, 1),
        norm3=nn.BatchNorm2d(6),
        head=nn.Linear(6, 3),
        act=act(),
    )


def _dense_block(act: Act) -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = self.stem(x)
        h = torch.cat([h, self.conv(self.act(self.norm(h)))], 1)
        return self.head(self.act(self.norm2(h)).mean((2, 3)))

    return net(
        forward,
        stem=nn.Conv2d(3, 4, 3, padding=1),
        norm=nn.BatchNorm2d(4),
        conv=nn.Conv2d(4, 5, 3, padding=1),
        norm2=nn.BatchNorm2d(9),
        head=nn.Linear(9, 3),
        act=act(),
    )


def _shared(act: Act) -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.head(self.act(self.up(x[:, 0])) * self.act(self.up(x[:, 1])))

    return net(forward, up=nn.Linear(5, 6), head=nn.Linear(6, 3), act=act())


def _by_hand(act: Act) -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        z = self.up(x)
        return self.head(z * torch.sigmoid(z) + torch.tanh(2 * z) / (1 + z * z))

    return net(forward, up=nn.Linear(5, 6), head=nn.Linear(6, 3))


def _two_readers(act: Act) -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        z = self.up(x)
        return self.head(torch.cat([self.act(z), torch.tanh(self.norm(z)), z], -1))

    return net(forward, up=nn.Linear(5, 6), norm=nn.BatchNorm1d(6), head=nn.Linear(18, 3), act=act())


def _token(act: Act) -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(x), -1, -1), self.act(self.up(x))], 1)
        return self.head(torch.tanh(h.mean(1)))

    model = net(forward, up=nn.Linear(5, 6), head=nn.Linear(6, 3), act=act())
    model.token = nn.Parameter(torch.randn(1, 1, 6))
    return model


def _masked(act: Act) -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = self.act(self.up(x)).masked_fill(x[..., :1] > 0.5, 2.0)
        return self.head(torch.tanh(nn.functional.pad(h, (0, 0, 1, 1), value=3.0).mean(1)))

    return net(forward, up=nn.Linear(5, 6), head=nn.Linear(6, 3), act=act())


CASES = (
    ChainCase("a token before the others", _token, (4, 5), {"up": "ChainOperator"}),
    ChainCase("masks and padding", _masked, (4, 5), {"up": "ChainOperator"}),
    ChainCase(
        "mlp",
        lambda act: nn.Sequential(nn.Linear(5, 6), act(), nn.Linear(6, 7), nn.BatchNorm1d(7), act(), nn.Linear(7, 3)),
        (5,),
        {"0": "PointwiseOperator", "2": "PointwiseOperator"},
    ),
    ChainCase(
        "depthwise",
        lambda act: _mobile(act, nn.Conv2d(3, 6, 1), *_depthwise(act)),
        (3, 6, 6),
        {"0": "DepthwiseOperator", "6": "PointwiseOperator"},
    ),
    ChainCase(
        "strided depthwise",
        lambda act: _mobile(act, nn.Conv2d(3, 6, 1, bias=False), *_depthwise(act, 2, norm=False)),
        (3, 7, 6),
        {"0": "DepthwiseOperator", "5": "PointwiseOperator"},
    ),
    ChainCase(
        "two depthwise stages",
        lambda act: _mobile(act, nn.Conv2d(3, 6, 1), *_depthwise(act, 2), *_depthwise(act, norm=False, dilation=2)),
        (3, 8, 8),
        {"0": "DepthwiseOperator", "8": "PointwiseOperator"},
    ),
    ChainCase(
        "depthwise behind a large convolution",
        lambda act: _mobile(act, nn.Conv2d(3, 6, 3, padding=1), *_depthwise(act)),
        (3, 6, 6),
        {"0": "ChainOperator", "6": "PointwiseOperator"},
    ),
    ChainCase(
        "squeeze and excitation",
        _excitation,
        (3, 6, 6),
        {"conv": "ConvOperator", "down": "PointwiseOperator", "out": "PointwiseOperator"},
    ),
    ChainCase("gate of two layers", _two_linears, (4, 5), {"a": "GatedOperator"}),
    ChainCase("gate with two activations", _two_curved_linears, (5,), {"a": "GatedOperator"}),
    ChainCase("gate of two halves", _chunked, (4, 5), {"both": "GatedOperator"}),
    ChainCase("gate that reads other rows", _gate_of_other_rows, (5,), {"a": "ChainOperator"}),
    ChainCase(
        "glu", lambda act: nn.Sequential(nn.Linear(5, 12), nn.GLU(), nn.Linear(6, 3)), (5,), {"0": "GatedOperator"}
    ),
    ChainCase(
        "stream", _stream, (3, 6, 6), {"stem": "ChainOperator", "down": "ConvOperator", "down2": "PointwiseOperator"}
    ),
    ChainCase(
        "stream before activations",
        _preactivation_stream,
        (3, 6, 6),
        {"stem": "ChainOperator", "down": "ConvOperator", "down2": "PointwiseOperator"},
    ),
    ChainCase("dense block", _dense_block, (3, 6, 6), {"stem": "ChainOperator", "conv": "ChainOperator"}),
    ChainCase("one weight used twice", _shared, (2, 5), {"up": "ChainOperator"}),
    ChainCase("functions by hand", _by_hand, (5,), {"up": "PointwiseOperator"}),
    ChainCase("several activations of one filter", _two_readers, (5,), {"up": "PointwiseOperator"}),
    ChainCase(
        "averages between activations",
        lambda act: nn.Sequential(
            nn.Conv2d(3, 6, 3), act(), nn.AvgPool2d(2), nn.Tanh(), nn.Conv2d(6, 5, 1), act(), Mean(), nn.Linear(5, 3)
        ),
        (3, 8, 8),
        {"0": "ChainOperator", "4": "PointwiseOperator"},
    ),
    ChainCase(
        "instance norm",
        lambda act: nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.InstanceNorm2d(4, affine=True),
            act(),
            nn.Conv2d(4, 5, 1),
            act(),
            Mean(),
            nn.Linear(5, 3),
        ),
        (3, 6, 6),
        {"0": "ChainOperator", "3": "PointwiseOperator"},
    ),
    ChainCase(
        "one dimension",
        lambda act: nn.Sequential(
            nn.Conv1d(3, 4, 3),
            nn.BatchNorm1d(4),
            act(),
            nn.ConvTranspose1d(4, 5, 2),
            act(),
            nn.Flatten(),
            nn.Linear(35, 3),
        ),
        (3, 8),
        {"0": "ChainOperator", "3": "ChainOperator"},
    ),
    ChainCase(
        "three dimensions",
        lambda act: nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), act(), nn.Flatten(), nn.Linear(108, 3)),
        (2, 3, 3, 3),
        {"0": "ChainOperator"},
    ),
)


def _pooled(act: Act) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        act(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 5, 3, padding=1),
        act(),
        nn.MaxPool2d(3, 2, 1),
        nn.Flatten(),
        nn.Linear(20, 3),
    )


def _cloud(act: Act) -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.head(self.act(self.b(self.act(self.a(x)))).amax(1))

    return net(forward, a=nn.Linear(3, 6), b=nn.Linear(6, 7), head=nn.Linear(7, 3), act=act())


def _edges(act: Act) -> nn.Module:
    return DGCNN((4, 5), 3, k=4, embedding=6, hidden=(4,), activation=act)


# Networks with maxima: their second derivative is that of the network only away from ties.
MAXIMA = (
    ChainCase("pooled", _pooled, (3, 8, 8), {"0": "TiedConvOperator", "4": "TiedConvOperator"}),
    ChainCase("cloud", _cloud, (12, 3), {"a": "PointwiseOperator", "b": "TiedConvOperator"}),
    ChainCase("edges", _edges, (12, 3), {"edgeconvs.0": "EdgeConvOperator", "edgeconvs.1": "EdgeConvOperator"}),
)
