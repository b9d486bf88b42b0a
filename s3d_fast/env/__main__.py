"""python -m s3d_fast.env: print which backends are available, and why the others are not."""

from s3d_fast import env
from s3d_fast.base.tables import text_table

print(text_table([["what", "state"], *map(list, env.report().items())]))
