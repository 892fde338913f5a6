"""gRPC server reflection as v1alpha and v1: Python's package has only v1alpha, newer clients ask for v1.

The messages of both are the same on the wire; only the package names differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

V1ALPHA_PACKAGE, V1_PACKAGE = "grpc.reflection.v1alpha", "grpc.reflection.v1"
V1_FILE = "grpc/reflection/v1/reflection.proto"
V1_SERVICE = f"{V1_PACKAGE}.ServerReflection"


def add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Adds reflection, which lists `service_names` (full proto names) and itself under both of its names."""
    _describe_v1()
    servicer = reflection.aio.ReflectionServicer([*service_names, reflection.SERVICE_NAME, V1_SERVICE])
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(V1_SERVICE, {"ServerReflectionInfo": method})
    server.add_generic_rpc_handlers((handler,))


def _describe_v1() -> None:
    """Adds v1's descriptor to the default pool: clients ask for the descriptor of every listed service."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileContainingSymbol(V1_SERVICE)
    except KeyError:
        file = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file)
        text = text_format.MessageToString(file).replace(V1ALPHA_PACKAGE, V1_PACKAGE)
        file = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
        file.name = V1_FILE
        pool.AddSerializedFile(file.SerializeToString())
