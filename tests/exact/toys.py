from dspark.proof.toys import *  # noqa: F403
