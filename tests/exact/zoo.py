from dspark.proof.zoo import CLEAN, MUTANTS  # noqa: F401
