"""`python -m infra.bucket NAME` creates a bucket of the S3 server that the AWS_* variables name; one that exists stays."""

from __future__ import annotations

import sys

import s3fs


def create_bucket(name: str) -> None:
    files = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
    if not files.exists(name):
        files.mkdir(name)


if __name__ == "__main__":
    create_bucket(sys.argv[1])
