"""The models of the zoo: for every library, functions that build a model and an example of its input."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

Build = Callable[[], tuple[nn.Module, Any]]


def _image(size: int = 64, channels: int = 3) -> torch.Tensor:
    return torch.randn(2, channels, size, size)


def _timm() -> dict[str, Build]:
    import timm

    sizes = {"vit": 64, "deit": 64, "inception": 128, "nasnetalarge": 128, "xception41": 96}
    names = """resnet18 resnet26d resnet50 resnext26ts seresnet18 resnetv2_50 ecaresnet26t gernet_s
    regnetx_002 regnety_002 regnetz_005 mobilenetv2_050 mobilenetv3_small_050
    mobilenetv4_conv_small efficientnet_b0 efficientnetv2_rw_t tf_efficientnet_lite0 mnasnet_050
    fbnetc_100 spnasnet_100 hardcorenas_a ghostnet_050 ghostnetv2_100 lcnet_050 tinynet_e
    semnasnet_075 rexnet_100 densenet121 vgg11 vgg11_bn inception_v3 inception_v4 xception41
    dla34 dpn48b hrnet_w18_small selecsls42b vovnet39a ese_vovnet19b_dw cspresnet50 cspdarknet53
    darknet17 darknet53 nf_resnet26 nfnet_l0 repvgg_a0 resnest14d skresnet18 tresnet_m
    convnext_atto convnextv2_atto convmixer_768_32 mixer_s32_224 gmixer_12_224 resmlp_12_224
    gmlp_ti16_224 vit_tiny_patch16_224 deit_tiny_patch16_224 deit3_small_patch16_224
    swin_tiny_patch4_window7_224 poolformer_s12 edgenext_xx_small mobilevit_xxs mobileone_s0
    efficientformer_l1 fastvit_t8 starnet_s1 levit_128s pit_ti_224 crossvit_tiny_240
    cait_xxs24_224 coat_lite_tiny visformer_tiny xcit_nano_12_p16_224 beit_base_patch16_224
    eva02_tiny_patch14_224 twins_svt_small pvt_v2_b0 hgnet_tiny inception_next_atto
    mambaout_femto caformer_s18 repghostnet_050 rdnet_tiny tiny_vit_5m_224 repvit_m0_9""".split()  # noqa: SIM905
    fixed = ("_224", "_240", "_12_p16", "mixer", "pit_", "efficientformer", "tiny_vit", "twins", "levit", "eva02")

    def build(name: str) -> Build:
        def make() -> tuple[nn.Module, Any]:
            model = timm.create_model(name, pretrained=False, num_classes=10)
            wanted = model.pretrained_cfg.get("input_size", (3, 224, 224))[-1]
            is_fixed = any(word in name for word in fixed) or model.pretrained_cfg.get("fixed_input_size")
            size = wanted if is_fixed else next((s for word, s in sizes.items() if name.startswith(word)), 64)
            return model, _image(size)

        return make

    return {name: build(name) for name in names}


def _torchvision() -> dict[str, Build]:
    from torchvision import models

    sizes = {"inception_v3": 128, "alexnet": 96, "vit_b_32": 224, "swin_t": 224, "googlenet": 64, "maxvit_t": 224}
    names = """alexnet vgg11 vgg13_bn resnet18 resnet34 resnet50 wide_resnet50_2 resnext50_32x4d
    squeezenet1_1 densenet121 inception_v3 googlenet shufflenet_v2_x0_5 mobilenet_v2
    mobilenet_v3_small mobilenet_v3_large efficientnet_b0 efficientnet_v2_s mnasnet0_5
    regnet_y_400mf regnet_x_400mf convnext_tiny vit_b_32 swin_t""".split()  # noqa: SIM905

    def build(name: str) -> Build:
        return lambda: (getattr(models, name)(weights=None), _image(sizes.get(name, 64)))

    found = {name: build(name) for name in names}

    def segmenter(name: str) -> Build:
        return lambda: (
            getattr(models.segmentation, name)(weights=None, weights_backbone=None, num_classes=4),
            _image(64),
        )

    found |= {
        name: segmenter(name) for name in ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")
    }

    def video(name: str) -> Build:
        return lambda: (getattr(models.video, name)(weights=None), torch.randn(2, 3, 8, 32, 32))

    return found | {name: video(name) for name in ("r3d_18", "mc3_18", "r2plus1d_18")}


_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}


def _transformers() -> dict[str, Build]:
    import transformers

    ids = {"input_ids": torch.randint(3, 90, (2, 12))}
    text = """Bert Roberta DistilBert Electra Albert DebertaV2 MPNet XLMRoberta Camembert RoFormer
    MobileBert SqueezeBert ConvBert FNet Nystromformer Llama Mistral Qwen2 Qwen3 Gemma Gemma2
    Phi Phi3 StableLm Olmo Cohere GPT2 GPTNeo GPTNeoX GPTJ OPT Bloom Falcon Mpt Mamba Ernie
    Persimmon Granite Starcoder2""".split()  # noqa: SIM905
    extra: dict[str, dict[str, Any]] = {
        "DistilBert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 2},
        "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
        "GPTNeo": {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
        "GPTJ": {"n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 8, "n_positions": 64},
        "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
        "Bloom": {"n_layer": 2, "n_head": 2},
        "Mpt": {"d_model": 32, "n_layers": 2, "n_heads": 2},
        "Falcon": {"num_kv_heads": 2},
        "Albert": {"embedding_size": 32},
        "Electra": {"embedding_size": 32},
        "MobileBert": {"embedding_size": 32, "intra_bottleneck_size": 16, "true_hidden_size": 16},
        "ConvBert": {"embedding_size": 32},
        "Gemma": {"num_key_value_heads": 1, "head_dim": 16},
        "Gemma2": {"num_key_value_heads": 1, "head_dim": 16},
        "Qwen3": {"head_dim": 16},
        "SqueezeBert": {"embedding_size": 32},
    }

    def language(name: str) -> Build:
        def make() -> tuple[nn.Module, Any]:
            options = {**_SMALL, **extra.get(name, {})}
            if name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Granite", "Starcoder2", "StableLm", "Cohere"):
                options.setdefault("num_key_value_heads", 2)
            config = getattr(transformers, f"{name}Config")(**options)
            for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
                if isinstance(getattr(config, key, None), int) and getattr(config, key) >= 99:
                    setattr(config, key, 0)
            if hasattr(config, "use_cache"):
                config.use_cache = False
            return getattr(transformers, f"{name}Model")(config), ids

        return make

    found = {name: language(name) for name in text}
    vision = {
        "ViT": {"image_size": 32, "patch_size": 8},
        "DeiT": {"image_size": 32, "patch_size": 8},
        "Dinov2": {"image_size": 32, "patch_size": 8},
        "Beit": {"image_size": 32, "patch_size": 8},
        "ViTMSN": {"image_size": 32, "patch_size": 8},
        "ConvNext": {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]},
        "ConvNextV2": {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]},
        "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
        "RegNet": {"embedding_size": 8, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "groups_width": 8},
        "MobileNetV1": {"depth_multiplier": 0.25},
        "MobileNetV2": {"depth_multiplier": 0.35},
        "PoolFormer": {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
        "Segformer": {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
    }

    def image(name: str, options: dict[str, Any]) -> Build:
        def make() -> tuple[nn.Module, Any]:
            base = {k: v for k, v in _SMALL.items() if k in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
            given = {
                **({} if "hidden_sizes" in options or "Mobile" in name else {**base, "intermediate_size": 48}),
                **options,
            }
            config = getattr(transformers, f"{name}Config")(**given)
            return getattr(transformers, f"{name}Model")(config), {
                "pixel_values": _image(32 if "image_size" in options else 64)
            }

        return make

    found |= {name: image(name, options) for name, options in vision.items()}

    def t5() -> tuple[nn.Module, Any]:
        config = transformers.T5Config(
            vocab_size=99, d_model=32, d_ff=48, d_kv=16, num_layers=2, num_heads=2, use_cache=False
        )
        return transformers.T5Model(config), {**ids, "decoder_input_ids": ids["input_ids"]}

    def wav2vec() -> tuple[nn.Module, Any]:
        config = transformers.Wav2Vec2Config(
            **_SMALL,
            conv_dim=(16, 16),
            conv_kernel=(8, 4),
            conv_stride=(4, 2),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=2,
        )
        return transformers.Wav2Vec2Model(config), {"input_values": torch.randn(2, 400)}

    return found | {"T5": t5, "Wav2Vec2": wav2vec}


def _segmentation_models() -> dict[str, Build]:
    import segmentation_models_pytorch as smp

    pairs = [("Unet", "resnet18"), ("UnetPlusPlus", "resnet18"), ("FPN", "resnet18"), ("PSPNet", "resnet18"),
             ("DeepLabV3Plus", "mobilenet_v2"), ("Linknet", "resnet18"), ("MAnet", "resnet18"),
             ("Unet", "efficientnet-b0"), ("Unet", "densenet121")]  # fmt: skip

    def build(kind: str, encoder: str) -> Build:
        return lambda: (getattr(smp, kind)(encoder, encoder_weights=None, classes=3), _image(64))

    return {f"{kind}-{encoder}": build(kind, encoder) for kind, encoder in pairs}


def _monai() -> dict[str, Build]:
    from monai.networks import nets

    def volume(size: int = 32) -> torch.Tensor:
        return torch.randn(2, 1, size, size, size)

    return {
        "UNet": lambda: (nets.UNet(3, 1, 2, (8, 16, 32), (2, 2), num_res_units=2), volume()),
        "BasicUNet": lambda: (nets.BasicUNet(3, 1, 2, (8, 8, 16, 16, 16, 8)), volume()),
        "AttentionUnet": lambda: (nets.AttentionUnet(3, 1, 2, (8, 16, 32), (2, 2)), volume()),
        "SegResNet": lambda: (nets.SegResNet(3, 8, 1, 2), volume()),
        "VNet": lambda: (nets.VNet(in_channels=1), volume(32)),
        "DynUNet": lambda: (nets.DynUNet(3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[8, 16, 32]), volume()),
        "DenseNet121": lambda: (nets.DenseNet121(2, 1, 4), _image(64, 1)),
        "SEResNet50": lambda: (nets.SEResNet50(spatial_dims=2, in_channels=1, num_classes=4), _image(64, 1)),
        "HighResNet": lambda: (nets.HighResNet(3, 1, 2), volume(16)),
        "EfficientNetBN": lambda: (
            nets.EfficientNetBN("efficientnet-b0", pretrained=False, spatial_dims=2),
            _image(64),
        ),
        "FullyConnectedNet": lambda: (nets.FullyConnectedNet(10, 3, (16, 12)), torch.randn(2, 10)),
        "AutoEncoder": lambda: (nets.AutoEncoder(2, 1, 1, (8, 16), (2, 2)), _image(32, 1)),
    }


def _pytorchcv() -> dict[str, Build]:
    from pytorchcv.model_provider import get_model

    names = """resnet10 preresnet10 seresnet10 resnext14_16x4d mobilenet_wd4 mobilenetv2_wd4
    mobilenetv3_small_w7d20 shufflenetv2_wd2 shufflenet_g1_wd4 squeezenet_v1_0 darknet_tiny
    peleenet igcv3_wd4 fdmobilenet_wd4 bagnet9 drnc26 diracnet18v2 proxylessnas_cpu
    menet108_8x1_g3 resnet20_cifar10 densenet40_k12_cifar10 wrn16_10_cifar10 nin_cifar10
    pyramidnet110_a48_cifar10""".split()  # noqa: SIM905

    def build(name: str) -> Build:
        return lambda: (get_model(name, pretrained=False), _image(32 if "cifar" in name else 224))

    return {name: build(name) for name in names}


def _efficientnet() -> dict[str, Build]:
    from efficientnet_pytorch import EfficientNet

    return {"efficientnet-b0": lambda: (EfficientNet.from_name("efficientnet-b0"), _image(64))}


def _diffusers() -> dict[str, Build]:
    import diffusers

    def unet() -> tuple[nn.Module, Any]:
        model = diffusers.UNet2DModel(
            sample_size=16,
            in_channels=3,
            out_channels=3,
            block_out_channels=(8, 16),
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "UpBlock2D"),
        )
        return model, {"sample": _image(16), "timestep": torch.tensor([1, 2]), "return_dict": False}

    def vae() -> tuple[nn.Module, Any]:
        return diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4), _image(16)

    def dit() -> tuple[nn.Module, Any]:
        model = diffusers.DiTTransformer2DModel(
            num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, norm_num_groups=4
        )
        return model, {
            "hidden_states": _image(8, 4), "timestep": torch.tensor([1, 2]), "class_labels": torch.tensor([1, 2]),
            "return_dict": False,
        }  # fmt: skip

    return {"UNet2DModel": unet, "AutoencoderKL": vae, "DiTTransformer2DModel": dit}


def _geometric() -> dict[str, Build]:
    from torch_geometric import nn as geometric

    edges = torch.randint(0, 10, (2, 30))

    def build(name: str) -> Build:
        return lambda: (getattr(geometric, name)(6, 16, 2, 3), (torch.randn(10, 6), edges))

    found = {name: build(name) for name in ("GCN", "GraphSAGE", "GIN", "GAT")}
    return found | {"MLP": lambda: (geometric.MLP([6, 16, 16, 3]), torch.randn(10, 6))}


def _vit_pytorch() -> dict[str, Build]:
    import vit_pytorch

    common = {"num_classes": 5, "dim": 32, "mlp_dim": 48, "depth": 2, "heads": 2}

    def simple() -> tuple[nn.Module, Any]:
        return vit_pytorch.SimpleViT(image_size=32, patch_size=8, **common), _image(32)

    def vit() -> tuple[nn.Module, Any]:
        return vit_pytorch.ViT(image_size=32, patch_size=8, **common), _image(32)

    return {"ViT": vit, "SimpleViT": simple}


def _pretrainedmodels() -> dict[str, Build]:
    import pretrainedmodels

    def build(name: str, size: int) -> Build:
        return lambda: (getattr(pretrainedmodels, name)(num_classes=1000, pretrained=None), _image(size))

    sizes: Iterable[tuple[str, int]] = (
        ("bninception", 224),
        ("se_resnet50", 224),
        ("xception", 96),
        ("nasnetamobile", 224),
    )
    return {name: build(name, size) for name, size in sizes}


LIBRARIES: dict[str, Callable[[], dict[str, Build]]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "transformers": _transformers,
    "segmentation_models_pytorch": _segmentation_models,
    "monai": _monai,
    "pytorchcv": _pytorchcv,
    "efficientnet_pytorch": _efficientnet,
    "diffusers": _diffusers,
    "torch_geometric": _geometric,
    "vit_pytorch": _vit_pytorch,
    "pretrainedmodels": _pretrainedmodels,
}
