"""The gateway's own API over gRPC: protos/gateway.proto."""
