"""Prompts that cannot run: what is wrong, and where."""

import pytest
from embedded_nodes import Trace, chain, node, node_class, recording_host
from lazy_h3.host.embedded.validation import types_fit


class Strict:
    """One input of every kind."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "run"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {"count": ("INT", {"min": 1, "max": 9}), "color": (["red", "blue"],)},
            "optional": {"model": ("MODEL",), "kind": ("COMBO", {"options": ["a", "b"]}), "ratio": ("FLOAT", {"min": 0.5})},
        }

    def run(self, **inputs):
        return {"ui": {"inputs": [inputs]}, "result": (None,)}


def errors_of(prompt, extra=None, outputs=None):
    with recording_host(Trace(), {"Strict": Strict} | (extra or {})) as host:
        return host.validate(prompt, outputs)


def result_of(prompt):
    with recording_host(Trace(), {"Strict": Strict}) as host:
        return host.run(prompt)


@pytest.mark.parametrize(
    ("inputs", "kind", "message"),
    [
        ({"color": "red"}, "required_input_missing", "Required input is missing"),
        ({"count": 0, "color": "red"}, "value_smaller_than_min", "Value 0 smaller than min of 1"),
        ({"count": 10, "color": "red"}, "value_bigger_than_max", "Value 10 bigger than max of 9"),
        ({"count": "many", "color": "red"}, "invalid_input_type", "Failed to convert an input value to a INT value"),
        ({"count": float("inf"), "color": "red"}, "invalid_input_type", "Failed to convert an input value to a INT value"),
        ({"count": 1, "color": "red", "ratio": float("nan")}, "invalid_input_type", "to a FLOAT value"),
        ({"count": 1, "color": "red", "ratio": "inf"}, "invalid_input_type", "to a FLOAT value"),
        ({"count": 1, "color": {"__value__": ["2", 0]}}, "bad_linked_input", "would be taken for a link"),
        ({"count": 1, "color": "green"}, "value_not_in_list", "Value not in list"),
        ({"count": 1, "color": "red", "kind": "c"}, "value_not_in_list", "Value not in list"),
        ({"count": 1, "color": "red", "model": ["7"]}, "bad_linked_input", "must be a length-2 list of [node_id, slot_index]"),
        ({"count": 1, "color": "red", "model": ["7", 0]}, "bad_linked_input", "the prompt has no node 7"),
        ({"count": 1, "color": "red", "model": ["2", 3]}, "bad_linked_input", "node 2 has 1 outputs and no slot 3"),
        ({"count": ["2", 0], "color": "red"}, "return_type_mismatch", "Return type mismatch between linked nodes"),
    ],
)
def test_each_kind_of_wrong_input_is_named(inputs, kind, message):
    validation = errors_of({"1": node("Strict", **inputs), "2": node("Load", name="te")})
    report = validation.node_errors["1"]
    (found,) = report["errors"]
    assert (found["type"], report["class_type"], report["dependent_outputs"]) == (kind, "Strict", ["1"])
    assert message in found["message"]
    assert next(iter(inputs.keys() & {found["extra_info"]["input_name"]}), "count") in found["details"]
    assert validation.error["type"] == "prompt_outputs_failed_validation"


def test_all_problems_of_a_node_are_told_at_once():
    problems = errors_of({"1": node("Strict", count=0, color="green")}).node_errors["1"]["errors"]
    assert [problem["type"] for problem in problems] == ["value_smaller_than_min", "value_not_in_list"]


def test_constants_are_cast_and_wrapped_lists_unwrapped():
    prompt = {"1": node("Strict", count="3", color={"__value__": "red"}, ratio=1)}
    result = result_of(prompt)
    assert result.outputs["1"]["inputs"] == [{"count": 3, "color": "red", "ratio": 1.0}]
    assert prompt["1"]["inputs"]["count"] == "3"


@pytest.mark.parametrize(
    ("prompt", "kind", "message"),
    [
        ({}, "prompt_no_outputs", "Prompt has no outputs"),
        ({"1": node("Load", name="te")}, "prompt_no_outputs", "Prompt has no outputs"),
        ({"1": node("Nowhere")}, "missing_node_type", "Node 'Nowhere' not found: is its node pack installed?"),
        ({"1": {"inputs": {}}}, "missing_node_type", "Node '#1' has no class_type: save the workflow in API format"),
        ({"1": {"class_type": "Nowhere", "_meta": None}}, "missing_node_type", "Node 'Nowhere' not found"),
        ({"1": {"class_type": "Nowhere", "_meta": ["title"]}}, "missing_node_type", "Node 'Nowhere' not found"),
        ({"1": {"class_type": ["Load"], "inputs": {}}}, "invalid_prompt", "save the workflow in API format"),
        ({"1": {"class_type": "Load", "inputs": None}}, "invalid_prompt", "save the workflow in API format"),
        ({"nodes": [], "links": []}, "invalid_prompt", "save the workflow in API format"),
    ],
)
def test_prompt_that_is_none_is_refused(prompt, kind, message):
    result = result_of(prompt)
    assert (result.status, result.error.type, result.executed) == ("error", kind, [])
    assert message in result.error.message


def test_bad_output_is_left_out_and_the_good_one_runs():
    prompt = chain() | {"4": node("Use", model=["1", 0]), "5": node("Show", value=["4", 0])}
    result = result_of(prompt)
    assert (result.status, result.executed) == ("success", ["1", "2", "3"])
    assert result.node_errors["4"]["dependent_outputs"] == ["5"]


def test_bad_node_that_no_output_needs_does_not_matter():
    assert result_of(chain() | {"9": node("Use")}).status == "success"


def test_cycle_is_told_with_its_path():
    prompt = {
        "1": node("Use", model=["2", 0], text=""),
        "2": node("Use", model=["1", 0], text=""),
        "3": node("Show", value=["1", 0]),
    }
    validation = errors_of(prompt)
    assert set(validation.node_errors) == {"1", "2"}
    assert validation.node_errors["1"]["errors"][0]["details"] == "1 (Use) -> 2 (Use) -> 1 (Use)"


def own_check(check):
    members = {"VALIDATE_INPUTS": classmethod(check), "OUTPUT_NODE": True}
    return node_class(lambda self, count: (count,), {"count": ("INT", {"min": 1})}, ("INT",), **members)


def test_own_check_of_a_node_replaces_the_standard_ones_for_what_it_takes():
    allows = own_check(lambda cls, count: True)
    assert errors_of({"1": node("Own", count=-5)}, {"Own": allows}).outputs == ["1"]
    refuses = own_check(lambda cls, count: f"{count} is odd")
    (found,) = errors_of({"1": node("Own", count=3)}, {"Own": refuses}).node_errors["1"]["errors"]
    assert (found["type"], found["details"]) == ("custom_validation_failed", "count - 3 is odd")


def test_own_check_that_raises_is_a_problem_of_its_node():
    broken = own_check(lambda cls, count: 1 / 0)
    (found,) = errors_of({"1": node("Own", count=3)}, {"Own": broken}).node_errors["1"]["errors"]
    assert (found["type"], found["details"]) == ("exception_during_validation", "division by zero")


def test_own_check_that_takes_types_may_allow_any_link():
    seen = []
    lenient = own_check(lambda cls, input_types: seen.append(input_types) or True)
    prompt = {"1": node("Own", count=["2", 0]), "2": node("Load", name="te")}
    assert errors_of(prompt, {"Own": lenient}).outputs == ["1"]
    assert seen == [{"count": "MODEL"}]


def test_targets_limit_which_outputs_are_checked():
    prompt = chain() | {"5": node("Show")}
    assert errors_of(prompt, outputs=["3"]).node_errors == {}
    assert errors_of(prompt, outputs=["1"]).error["type"] == "prompt_no_outputs"


@pytest.mark.parametrize(
    ("received", "wanted", "fit"),
    [
        ("IMAGE", "IMAGE", True),
        ("IMAGE", "MASK", False),
        ("INT,FLOAT", "FLOAT,STRING", True),
        ("*", "MASK", True),
        ("IMAGE", "*", True),
        (["a"], "COMBO", True),
        (["a"], ["a"], True),
        (["a"], ["b"], False),
        ("INT", ["b"], False),
    ],
)
def test_types_fit(received, wanted, fit):
    assert types_fit(received, wanted) is fit
