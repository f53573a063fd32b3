"""The adapters of a solution, each of which writes its name down when it is called."""

import functools
from pathlib import Path

from tests import solution


def noted(function):
    @functools.wraps(function)
    def call(**arguments):
        with Path(__file__).with_name("called").open("a") as file:
            print(function.__name__, file=file)
        return function(**arguments)

    return call


run_rmsnorm = noted(solution.run_rmsnorm)
run_swiglu = noted(solution.run_swiglu)
run_rope = noted(solution.run_rope)
run_scaled_dot_product_attention = noted(solution.run_scaled_dot_product_attention)
run_multihead_self_attention = noted(solution.run_multihead_self_attention)
run_multihead_self_attention_with_rope = noted(
    solution.run_multihead_self_attention_with_rope
)
run_transformer_block = noted(solution.run_transformer_block)
