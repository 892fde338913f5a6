"""`EncoderWorker`: a dense worker that serves an encoder. It attaches to no attention worker."""

from __future__ import annotations

import asyncio

import torch

from services.common.child_options import ChildOptions
from services.common.config import Config
from services.common.encoders.encoder_config import TextEncoderConfig
from services.common.errors import ConfigError
from services.common.max_model_len import check_max_model_len
from services.common.pooling.pooling_config import PoolingConfig, read_pooling
from services.common.ready_shape import read_encoder
from services.common.resolve import resolve_device, use_device
from services.common.weight_files import checkpoint_files
from services.dense_worker.encoders.text.encoder_engine import EncoderEngine
from services.dense_worker.encoders.text.load_encoder import load_encoder, random_encoder
from services.dense_worker.encoders.text.pooled_text import TextPooling
from services.dense_worker.encoders.text.text_encoder import EncoderRun, TextEncoder
from services.dense_worker.engine.attachment import Attachment, AttachmentEnd
from services.dense_worker.engine.session import NO_ATTACHMENT
from services.dense_worker.model.weights import heads_hash
from services.dense_worker.service import GatewayWorker, scheduler_limits
from services.pb import dense_pb2


class EncoderWorker(GatewayWorker):
    """Serves gateways whenever it may."""

    def __init__(self, config: Config, options: ChildOptions) -> None:
        super().__init__(config, options)
        self._has_left = asyncio.Event()

    async def start(self) -> None:
        """Begins to answer health checks, loads the weights, and starts the engine."""
        config = self._config
        observers, tracer = self._begin()
        check_config(config)
        shape, pooling = await read_encoder(self._options.shape_file, config.model), read_pooling(config.model)
        if pooling is None:
            raise ConfigError("model.runner is generate, but the model is an encoder, which generates nothing")
        self._shape = shape
        self._max_input_tokens = input_limit(config, shape, pooling)
        device = resolve_device(config.dense.device)
        use_device(device, config.dense.num_threads)
        await self._start_server(tracer)
        servicer, standby = self._servicer, self._options.standby
        self._weights_hash = servicer.status.weights_hash = weights_hash(config, pooling)
        if standby not in (None, "loaded"):  # loading takes a moment, and another copy of the weights much memory
            servicer.status.state = dense_pb2.DenseStatus.STANDBY
            await servicer.may_attach.wait()
            servicer.status.state = dense_pb2.DenseStatus.LOADING
        self._encoder = await asyncio.to_thread(load, config, shape, pooling, device)
        engine = EncoderEngine(
            self._encoder,
            pooling.method,
            scheduler_limits(config, self._max_input_tokens),
            self._deliver,
            observers,
            lambda: self._loop.call_soon_threadsafe(self._has_left.set),
        )
        self._start_engine(engine, engine.progress, [TextPooling(pooling.token_heads)], shape.vocab_size)
        if standby is None:
            servicer.may_attach.set()
        servicer.note_unattached()

    async def _serve(self) -> None:
        """It can, from when it may until another dense worker takes over."""
        while True:
            await self._servicer.may_attach.wait()
            self._has_left.clear()
            await self.ready(NO_ATTACHMENT)
            await self._has_left.wait()
            await self.detached(AttachmentEnd("another dense worker takes over", is_crash=False))

    def _describe(self, attachment: Attachment) -> dense_pb2.DenseInfo:
        shape = self._shape
        return dense_pb2.DenseInfo(
            family=shape.family,
            dtype=str(self._encoder.dtype).removeprefix("torch."),
            vocab_size=shape.vocab_size,
            num_layers=shape.num_layers,
            max_model_len=self._max_input_tokens,
            weights_hash=self._weights_hash,
            backend="torch",
            device=str(self._encoder.device),
            epoch=self._epoch,
            max_num_seqs=self._config.scheduler.max_num_seqs,
            hidden_size=shape.hidden_size,
            continues_sequences=self._options.continues_sequences,
        )


def check_config(config: Config) -> None:
    """Refuses what an encoder has no place for. Raises `ConfigError`."""
    dense, scheduler = config.dense, config.scheduler
    for key, value, neutral in (
        ("dense.backend", dense.backend, ("auto", "torch")),
        ("dense.tensor_parallel_size", dense.tensor_parallel_size, (1,)),
        ("dense.pipeline_parallel_size", dense.pipeline_parallel_size, (1,)),
        ("dense.quantization", dense.quantization, ("checkpoint",)),
        ("dense.deterministic", dense.deterministic, (False,)),
        ("dense.max_loras", dense.max_loras, (0,)),
        ("scheduler.speculation", scheduler.speculation, ("off",)),
        ("model.classifier_from_token", config.model.classifier_from_token, ((),)),
    ):
        if value not in neutral:
            supported = ", ".join(map(str, neutral))
            raise ConfigError(f"{key} is {value!r}, but the model is an encoder: supported is {supported}")


def input_limit(config: Config, shape: TextEncoderConfig, pooling: PoolingConfig) -> int:
    """The longest input in tokens. Raises `ConfigError` if the config asks for more than the model has positions."""
    asked = config.model.max_model_len
    check_max_model_len(config.model, shape)
    return asked or min(shape.max_input_tokens, pooling.max_input_tokens or shape.max_input_tokens)


def load(config: Config, shape: TextEncoderConfig, pooling: PoolingConfig, device: torch.device) -> TextEncoder:
    """The weights on the device, after a first short run: libraries choose and load their kernels."""
    section, name = config.model, config.model.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else shape.checkpoint_dtype
    dtype: torch.dtype = getattr(torch, name)
    if section.load_format == "dummy":
        encoder = random_encoder(shape, pooling, dtype, device, section.dummy_seed)
    else:
        encoder = load_encoder(section.path, shape, pooling, dtype, device)
    with torch.inference_mode():
        run = EncoderRun(encoder, [[0, 0]], [0])
        while not run.is_done:
            run.advance()
        if pooling.has_each_token:
            run.tokens([0])
        else:
            run.pool(pooling.method)
    return encoder


def weights_hash(config: Config, pooling: PoolingConfig) -> str:
    """Identifies the weights, as that of decoders does."""
    section = config.model
    if section.load_format == "dummy":
        return f"random-{section.dummy_seed}"
    heads = sorted(section.path / f"{head.file_stem}.safetensors" for head in pooling.token_heads)
    return heads_hash(section.path, [*checkpoint_files(section.path), *heads])
