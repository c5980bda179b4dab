"""Where the classes and their documents are."""

CLASS_FILE_PATH_MAPPING = {
    "Shelf": "bfcl_eval.eval_checker.multi_turn_eval.func_source_code.shelf",
    "MemoryAPI_kv": "bfcl_eval.eval_checker.multi_turn_eval.func_source_code.memory_kv",
}
MULTI_TURN_FUNC_DOC_FILE_MAPPING = {"Shelf": "shelf.json", "MemoryAPI_kv": "memory_kv.json"}
