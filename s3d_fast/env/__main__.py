"""python -m s3d_fast.env: the same as s3d-fast env."""

from s3d_fast import env

print(env.table())
