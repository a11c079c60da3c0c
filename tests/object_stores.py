"""S3 for tests of clusters, as moto's server has it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest

_NUMBERS = itertools.count()  # servers of one process share what they hold


@contextlib.contextmanager
def bucket() -> Iterator[tuple[str, dict[str, str]]]:
    """The address of an empty bucket, and its options. A second put of a name must be refused."""
    pytest.importorskip("moto.server", reason="S3 is moto's server")
    import boto3
    from botocore.exceptions import ClientError
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        name = f"bucket{next(_NUMBERS)}"
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys)
        client.create_bucket(Bucket=name)
        client.put_object(Bucket=name, Key="once", Body=b"first", IfNoneMatch="*")
        with pytest.raises(ClientError, match="PreconditionFailed"):  # else two commits could have one name
            client.put_object(Bucket=name, Key="once", Body=b"second", IfNoneMatch="*")
        yield f"s3://{name}", {**keys, "aws_endpoint": endpoint, "aws_region": "us-east-1", "allow_http": "true"}
    finally:
        server.stop()
