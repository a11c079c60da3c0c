"""A table in an object store: S3 as moto's server has it, whose conditional puts are tested first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("lance", reason="the table of a cluster is Lance's")
pytest.importorskip("moto.server", reason="S3 is moto's server")

import boto3
from botocore.exceptions import ClientError
from lance_tables import batch, contents, hydrated, made, told
from moto.server import ThreadedMotoServer

from softdb import errors
from softdb.cluster.truth import stored

pytestmark = pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Options of an empty store with a bucket. A second put of a name must be refused."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys)
        client.create_bucket(Bucket="bucket")
        client.put_object(Bucket="bucket", Key="once", Body=b"first", IfNoneMatch="*")
        with pytest.raises(ClientError, match="PreconditionFailed"):  # else two commits could have one name
            client.put_object(Bucket="bucket", Key="once", Body=b"second", IfNoneMatch="*")
        yield {**keys, "aws_endpoint": endpoint, "aws_region": "us-east-1", "allow_http": "true"}
    finally:
        server.stop()


def test_a_table_in_a_bucket(store: dict[str, str], tmp_path: Path) -> None:
    truth = made("s3://bucket/t.lance", shards=2, options=store)
    truth.insert(batch(truth, ["a", "b", "c"]))
    followed = hydrated(truth, tmp_path / "cache")
    found: list[object] = []

    def insert(seed: int) -> None:
        writer = stored(truth.url, store)
        try:
            found.append(writer.insert(batch(writer, ["same", f"own {seed}"], seed=seed)))
        except errors.SoftDBError as error:
            found.append(type(error))

    writers = [threading.Thread(target=insert, args=(seed,)) for seed in (1, 2)]
    for one in writers:
        one.start()
    for one in writers:
        one.join(120)
    assert found.count(errors.DuplicateId) == 1, found
    truth.delete(["a"])
    followed.follow(truth.newest())
    assert contents(followed) == told(truth)
    assert len(told(truth)) == 4
    followed.close()
    with pytest.raises(errors.NotADatabase, match="holds no table that can be read"):
        stored("s3://bucket/none.lance", store)
