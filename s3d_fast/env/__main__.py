"""python -m s3d_fast.env: print what is available here, and why the rest is not."""

from s3d_fast import env
from s3d_fast.base.tables import text_table

print(text_table([["what", "state"], *map(list, env.report().items())]))
