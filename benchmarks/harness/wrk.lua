-- Posts one body over and over; prints what was counted as one line of JSON at the end.
-- Arguments after "--": the file with the body, its content type, more headers.
function init(args)
  local file = assert(io.open(args[1], "rb"))
  wrk.method = "POST"
  wrk.body = file:read("*a")
  file:close()
  wrk.headers["Content-Type"] = args[2]
  for number = 3, #args do
    local name, value = args[number]:match("^(.-): (.*)$")
    wrk.headers[name] = value
  end
end

function done(summary, latency, requests)
  local parts = {}
  for _, p in ipairs({1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9}) do
    parts[#parts + 1] = string.format('"%s": %d', p, latency:percentile(p))
  end
  local e = summary.errors
  io.write(string.format('\nJSON {"requests": %d, "duration_us": %d, "bad_status": %d, "lost": %d, ' ..
    '"latency_us": {%s}}\n', summary.requests, summary.duration, e.status,
    e.connect + e.read + e.write + e.timeout, table.concat(parts, ", ")))
end
