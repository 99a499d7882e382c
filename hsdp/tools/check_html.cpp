#include "hsdp/tools/check_html.h"

#include <string_view>

#include "check_report.h"
#include "hsdp/tools/check_json.h"

namespace hsdp {

bool is_html_report(std::string_view page) {
  return page.starts_with("<!doctype html>") &&
         page.find("<title>hsdp_check</title>") != std::string_view::npos;
}

std::string to_html(const nlohmann::ordered_json& findings) {
  constexpr std::string_view kPlace = "@FINDINGS@";
  std::string data;
  // Escape '<', so that no text can end its script element.
  for (const char c : dump(findings, -1)) {
    if (c == '<') {
      data += "\\u003c";
    } else {
      data += c;
    }
  }
  std::string page(kCheckReport);
  return page.replace(page.find(kPlace), kPlace.size(), data);
}

}  // namespace hsdp
