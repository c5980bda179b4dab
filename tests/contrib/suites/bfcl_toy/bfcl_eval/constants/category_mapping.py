"""Categories and their groups."""

MEMORY_CATEGORY = ["memory_kv"]
SINGLE = ["simple_python", "simple_java", "irrelevance", "live_relevance"]
MULTI = ["multi_turn_base", "multi_turn_miss_func"]
WEB = ["web_search_base"]
ALL_CATEGORIES = [*SINGLE, *MULTI, *MEMORY_CATEGORY, *WEB]
TEST_COLLECTION_MAPPING = {
    "single_turn": SINGLE,
    "multi_turn": MULTI,
    "memory": MEMORY_CATEGORY,
    "agentic": [*MEMORY_CATEGORY, *WEB],
}
